"""Predictions held against what was measured, and the record of it."""
