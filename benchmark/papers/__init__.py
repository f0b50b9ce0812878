"""Evaluations of papers, run again on the simulator: baselines as configurations, figures as tables and plots."""
