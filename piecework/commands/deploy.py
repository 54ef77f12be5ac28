"""The commands of a federation outside the simulator."""

import json
from pathlib import Path
from typing import Annotated

import typer

from piecework.commands.base import Json, Named, Preset, Set, SettingsCommand, err, out, user_errors, with_shorthands
from piecework.commands.options import OPTIONS, settings_from

commands = typer.Typer()


@commands.command(cls=SettingsCommand)
@with_shorthands
def export_data(
    folder: Annotated[Path, typer.Option("--out", help="the folder to write: node-0, node-1, ... and server")],
    preset: Preset = "",
    named: Named = {},  # noqa: B006
    nodes: Annotated[int, typer.Option(min=0, help="number of clients; default: the preset's")] = 0,
    force: Annotated[bool, typer.Option("--force", help="replace an earlier export")] = False,
    assignments: Set = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Write each client's data and the server's part into folders of their own, for devices and containers."""
    from piecework.commands.export_data import export_data as export
    from piecework.commands.export_data import export_table

    with user_errors(as_json, {}):
        rows = export(settings_from(preset, assignments, nodes=nodes, named=named), folder, force)
        if as_json:
            print(json.dumps({"out": str(folder.absolute()), "folders": rows}))
            return
        out.print(export_table(rows))
        out.print("copy each to its device, and set data-dir in its node-config; the server finds its own by data-dir")


@commands.command(cls=SettingsCommand)
def own_data(
    source: Annotated[str, typer.Argument(help="npz:FILE, table:FILE, folder:DIR or another data set")],
    folder: Annotated[Path, typer.Option("--out", help="the folder to write, which is the node's data-dir")],
    force: Annotated[bool, typer.Option("--force", help="replace the node's earlier data")] = False,
    assignments: Set = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Make a device's data folder from data of its own, which stay on it."""
    from piecework.commands.own_data import describe_own, make_own_data

    with user_errors(as_json, {}):
        made = make_own_data(settings_from("", [*assignments, f"dataset={source}"]), folder, force)
        if as_json:
            print(json.dumps(made))
            return
        out.print(describe_own(made), highlight=False, soft_wrap=True)
        out.print(f'set data-dir="{made["folder"]}" in its node-config', highlight=False, soft_wrap=True)


@commands.command(cls=SettingsCommand)
def profile(
    name: Annotated[str, typer.Option(help="name of the device in the fleet; default: this machine's")] = "",
    seconds: Annotated[float, typer.Option(help="how long to compute: a warm board is slower than a cold one")] = 10.0,
    folder: Annotated[Path, typer.Option(help="a folder on the disk that the node's state will be on")] = Path(),
    file: Annotated[Path | None, typer.Option("--out", help="write the TOML there instead of to stdout")] = None,
    assignments: Set = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    r"""Measure this machine into a \[\[device]] table for a fleet, by the settings training.torch-threads and reserve."""
    import platform

    from piecework.commands.profile_device import check_new, profile_device, toml_text, write_new

    with user_errors(as_json, {}):
        settings = settings_from("", assignments)
        if file is not None:
            check_new(file)
        device = name or platform.node() or "device"
        measured = profile_device(device, seconds, folder, settings.training.torch_threads, settings.memory.reserve)
        if file is not None:
            write_new(file, toml_text(measured))
        if as_json:
            rest = {"first-flops": measured.first_flops, "slows-down": measured.slows_down}
            print(json.dumps(measured.values() | rest))
        elif file is None:
            print(toml_text(measured), end="")
        first, kept = f"{measured.first_flops:.3g}", f"{measured.sustained_flops:.3g}"
        err.print(f"FLOP/s: {first} in the first second, {kept} sustained", highlight=False)
        if measured.slows_down:
            err.print("it slows down under load: cool it better, or plan with the sustained figure", highlight=False)
        if file is not None:
            err.print(f"wrote {file}: name it as pool in a fleet file, or copy its [[device]]", soft_wrap=True)


@commands.command()
def certs(
    names: Annotated[
        list[str] | None, typer.Argument(help="host names and addresses by which devices reach the server")
    ] = None,
    nodes: Annotated[int, typer.Option(help="how many nodes get keys: node-0, node-1, ...")] = 1,
    folder: Annotated[Path, typer.Option("--out", help="folder of the certificates")] = Path("certs"),
    days: Annotated[int, typer.Option(help="days that certificates are valid")] = 825,
    as_json: Json = False,
) -> None:
    """Make the certificates and keys of a federation; repeated with other names or more nodes, only missing files."""
    from dataclasses import asdict

    from rich.table import Table

    from piecework.deploy.certs import issue

    with user_errors(as_json, {}):
        made = issue(names or [], nodes, folder, days)
        if as_json:
            print(json.dumps({"folder": str(folder.absolute()), "files": [asdict(file) for file in made]}))
            return
        table = Table("file", "", "ends", "names")
        for file in made:
            table.add_row(file.file, file.done, file.until, ", ".join(file.names))
        out.print(table)
        out.print(
            "ca.crt goes to every device, nodes/node-I.* to node I only; ca.key stays here (docs/howto/security.md)"
        )


@commands.command()
def register(
    folder: Annotated[Path, typer.Argument(help="what `piecework certs` made")],
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the SuperLink")],
    root_certificates: Annotated[Path | None, typer.Option(help="default: FOLDER/ca.crt")] = None,
    revoke: Annotated[str, typer.Option(metavar="NODE", help="revoke the key of this node permanently")] = "",
    as_json: Json = False,
) -> None:
    """Register the keys of the allowed nodes (nodes/*.pub) with a SuperLink that has --enable-supernode-auth."""
    from dataclasses import asdict

    from rich.table import Table

    from piecework.deploy import registration

    with user_errors(as_json, {}):
        trusted = root_certificates or folder / "ca.crt"
        if revoke:
            nodes = [registration.revoke(folder, revoke, superlink, trusted)]
        else:
            nodes = registration.register(folder, superlink, trusted)
        if as_json:
            print(json.dumps({"superlink": superlink, "nodes": [asdict(node) for node in nodes]}))
            return
        table = Table("node", "id", "", "state")
        for node in nodes:
            table.add_row(node.node, str(node.node_id), node.done, node.state)
        out.print(table)
        if not revoke and any(node.state == "revoked" for node in nodes):
            out.print(
                "a revoked key is never accepted again: delete that node's .key and .pub, then certs and register again"
            )


@commands.command(cls=SettingsCommand)
@with_shorthands
def compose(
    preset: Preset = "",
    named: Named = {},  # noqa: B006
    nodes: Annotated[int, typer.Option(min=0, help="number of clients; default: the preset's")] = 0,
    floor: Annotated[str, typer.Option(help="memory that a client takes besides training; default: 320MB")] = "",
    limit: Annotated[str, typer.Option(help="memory of each client, which measures what it leaves to train with")] = "",
    data: Annotated[str, typer.Option(help="what `export-data` wrote, as seen from the compose file")] = "./data",
    tls: Annotated[bool, typer.Option("--tls", help="print the overlay for certificates and keys instead")] = False,
    certs: Annotated[
        str, typer.Option(help="with --tls: what `certs` made, as seen from the compose file")
    ] = "./certs",
    assignments: Set = [],  # noqa: B006
) -> None:
    """Print a compose file in which each client is a container whose memory limit is its device's memory."""
    from piecework.deploy.compose import FLOOR, clients_in_containers, command_line, compose_file, tls_overlay

    with user_errors(False):
        settings = settings_from(preset, assignments, nodes=nodes, named=named)
        shorthands = {OPTIONS[key]: value for key, value in named.items()}
        memory = {key: value for key, value in (("--floor", floor), ("--limit", limit)) if value} or {"--floor": FLOOR}
        given = {"--preset": preset} | shorthands | {"--nodes": nodes} | memory | {"--data": data}
        command = command_line(given | ({"--certs": certs} if tls else {}), assignments, tls)
        clients = clients_in_containers(settings, memory)
        text = tls_overlay(clients, certs, command) if tls else compose_file(clients, data, command)
        print(text, end="")
