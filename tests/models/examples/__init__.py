"""Examples for fine-tuning: records, forms, chat templates, tokens and masks."""
