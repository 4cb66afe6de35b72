"""The configuration tree: its keys, how it is read, and how it is checked.

This package needs neither torch nor Megatron nor vLLM.
"""
