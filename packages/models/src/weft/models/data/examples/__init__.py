"""Examples for fine-tuning: conversations, preferences and judged completions, as tokens with masks."""
