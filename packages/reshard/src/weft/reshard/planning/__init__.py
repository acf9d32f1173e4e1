"""What plans: values, from layouts, shapes and sizes alone. Nothing here knows a process group."""
