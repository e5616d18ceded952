"""Speculation: who proposes tokens, and how a proposal is judged."""
