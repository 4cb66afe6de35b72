"""The stages of tools/gpu_acceptance.py."""
