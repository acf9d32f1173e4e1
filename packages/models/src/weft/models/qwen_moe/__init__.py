"""Qwen 3 with mixtures of experts: config, model, parallel plan and Hugging Face format."""
