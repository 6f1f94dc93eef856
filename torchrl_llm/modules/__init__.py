"""What computes with a language model: policies, the scorer, the critic, and adapters."""
