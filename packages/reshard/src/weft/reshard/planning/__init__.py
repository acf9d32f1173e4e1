"""Planning: pure functions and values of layouts, shapes and sizes. Nothing here uses a process group."""
