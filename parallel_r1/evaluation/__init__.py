"""Measuring responses."""
