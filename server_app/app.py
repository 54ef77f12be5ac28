"""The ServerApp: validates the settings and runs the rounds."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Flower's entry: the same loop as every engine's."""
    from piecework.server_app.rounds import run_experiment
    from piecework.server_app.run_folder import resolve_run_dir
    from piecework.server_app.used_settings import require_used
    from piecework.training.settings import Settings

    settings = Settings.from_run_config(context.run_config)
    if not settings.resume_from:  # what a run was begun with does not keep it from going on
        require_used(settings)
    run_experiment(grid, settings, resolve_run_dir(settings))
