"""Generation with an in-process vLLM engine in every rank."""
