"""Llama and Mistral: config, model, parallel plan and Hugging Face format."""
