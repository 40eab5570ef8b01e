"""The command `python -m onebit_jax plan` given what is no value."""

import pytest

from onebit_jax import __main__ as command

ARGUMENTS = {
    "--parameters": "340e6",
    "--workers": "64",
    "--bandwidth": "10Gbit",
    "--step-time": "0.45",
    "--steps": "1000",
}
OTHERS = ("--host-bandwidth", "--calibration", "--warmup", "--latency", "--local-bits")


@pytest.mark.parametrize("name", [*ARGUMENTS, *OTHERS])
def test_an_option_without_a_value_ends_the_command_with_a_line(name, capsys):
    arguments = [f"{option}={value}" for option, value in ARGUMENTS.items() if option != name]
    with pytest.raises(SystemExit) as ended:
        command.main(["plan", *arguments, f"{name}=--"])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1] == f"python -m onebit_jax: error: {name} must have a value."


def test_an_empty_rate_is_refused(capsys):
    arguments = [f"{option}={value}" for option, value in ARGUMENTS.items()]
    with pytest.raises(SystemExit):
        command.main(["plan", *arguments, "--host-bandwidth="])
    assert "--host-bandwidth must have a value" in capsys.readouterr().err
