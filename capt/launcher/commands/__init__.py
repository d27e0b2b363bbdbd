"""The commands of ``capt``, one file a subject. Functions import what they use when they run, so help is fast.

A row names a group of commands (``MODULE:APP``, called like the row) or a module whose ``register(app)`` adds commands
beside the others. Another distribution adds such rows through the entry-point group ``capt.commands``. A parameter of a
command may be a dataclass of options (`capt.launcher.commands.options.with_options`).
"""

COMMANDS = {
    **{
        name: f"capt.launcher.commands.{name}"
        for name in ("jobs", "plan", "sweep", "evaluate", "predict", "checkpoints")
    },
    **{name: f"capt.launcher.commands.{name}" for name in ("retrieval", "results", "tools")},
    "tokenizer": "capt.launcher.commands.tokenizers:app",
    **{name: f"capt.launcher.commands.{name}:app" for name in ("data", "regions", "config", "cache", "embeddings")},
    **{name: f"capt.launcher.commands.{name}:app" for name in ("latent", "ledger", "predictions", "search")},
}
