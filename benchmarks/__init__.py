"""Commands outside the packages: comparisons, studies, and the models that they need."""
