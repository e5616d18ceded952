"""Between text and token ids: tokenizer, chat template, and the way back while tokens arrive. No torch."""
