"""Algorithms turn scores into advantages (numbers only); losses turn advantages into gradients (torch, imported by engines alone)."""
