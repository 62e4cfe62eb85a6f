"""Measures the structure of the product from its own syntax trees: `tools/measure-house` prints what is found here.

Standard library only, and nothing of the product is imported: it measures a tree that does not run, too.
"""
