"""Model presets: one YAML file a model, read by `longtrain.config`."""
