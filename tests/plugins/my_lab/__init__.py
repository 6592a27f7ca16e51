"""A lab's own package: a simulator, a model and an estimator that rlinf has never heard of."""
