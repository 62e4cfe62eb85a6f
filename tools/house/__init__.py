"""Measures the structure of the product from its syntax trees; `tools/measure-house` prints the results.

Uses only the standard library and does not import the product, so it also measures a tree that does not run.
"""
