"""Other published methods, fitted on the same trace as ours: calibrators, exit rules, ensembles, risk control."""
