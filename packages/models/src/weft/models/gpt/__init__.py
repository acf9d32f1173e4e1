"""GPT-2: its config, its model and how it is laid out."""
