"""The ServerApp: validates the settings and runs the rounds."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Flower's entry: the same loop as every engine's."""
    from server_app.rounds import resolve_run_dir, run_experiment
    from server_app.settings import Settings

    settings = Settings.from_run_config(context.run_config)
    run_experiment(grid, settings, resolve_run_dir(settings))
