"""The platforms that run jobs: one package each. Launchers import neither TensorFlow nor the runtime."""
