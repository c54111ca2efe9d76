"""Where jobs run: one package per platform. Launchers import neither TensorFlow nor the runtime."""
