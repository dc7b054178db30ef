"""Chat completions, read without a provider library."""
