"""What tests, benchmarks and the demo share: small parts that are real. Import from the submodules.

:mod:`~torchrl_llm.testing.tiny` locates the shipped model; importing this package imports nothing
else.
"""
