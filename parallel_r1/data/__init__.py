"""Problems and prompts: reading public sources (`sources`), templates (`prompts`), order (`order`), DataModules."""
