"""Compressed gradient exchange inside other frameworks, one module for each framework."""
