"""Compressed exchanges inside other frameworks, one module each."""
