"""Qwen 2, 2.5 and 3: config, model, parallel plan and Hugging Face format."""
