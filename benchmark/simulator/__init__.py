"""What the simulator is fed with: costs of machines and models, and workloads. All that comes out is simulated."""
