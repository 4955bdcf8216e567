"""From logits to tokens: parameters, processing order, stateless noise, log-probabilities."""
