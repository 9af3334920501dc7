"""Calibration of every exit: traces, the Laplace approximation, and the tuning of temperatures and priors."""
