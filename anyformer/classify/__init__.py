"""Small text classifiers in two kinds of numbers, to see what complex ones change."""
