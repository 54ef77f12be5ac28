"""The ServerApp: validates the settings and runs the rounds."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds. Flower calls this function; all engines use the same loop behind it."""
    from piecework.server_app.experiment import run_experiment
    from piecework.server_app.run_folder import resolve_run_dir
    from piecework.server_app.signals import end_on_hangup
    from piecework.server_app.told import tell_end, tell_round, tell_start, through_flower
    from piecework.server_app.used_settings import require_used
    from piecework.training.settings import Settings

    end_on_hangup()
    through_flower()
    settings = Settings.from_run_config(context.run_config)
    if not settings.resume_from:  # settings of the original run must not prevent resuming it
        require_used(settings)
    run_dir = resolve_run_dir(settings)
    tell_start(grid, settings, run_dir)
    run_experiment(grid, settings, run_dir, lambda record: tell_round(record, settings))
    tell_end(run_dir)
