"""Figure of tokens per second with dense and with packed weights."""

from ..common.figure_style import COLOURS, GREY, Files, add_legend, new_figure, show_round_numbers
from .speed import SpeedReport


def plot_speed(report: SpeedReport) -> Files:
    """Draw a bar per form of the model and kind of work on a log axis, with the ratios to the dense form beside.

    Args:
        report ([`SpeedReport`]): with at least one timing.

    Returns:
        `dict`: ".png" and ".svg" -> content of the file.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    timings = report.timings
    forms = {"dense weights": [timing.dense for timing in timings]}
    forms["packed weights"] = [timing.packed for timing in timings]
    forms |= {name: [timing.others[name] for timing in timings] for name in timings[0].others}
    threads = f"{report.threads} thread{'s' * (report.threads != 1)}"
    share = report.packed_bytes / report.dense_bytes
    title = f"{report.model}, {report.dtype}, {threads}: packed, {share:.2f} of the bytes"
    with new_figure(1.2 + (0.4 + 0.1 * len(forms)) * len(timings), title) as (figure, files):
        axes = figure.subplots()
        width = 0.8 / len(forms)
        for offset, ((name, rates), colour) in enumerate(zip(forms.items(), (GREY, *COLOURS))):
            places = [index + width * (offset - (len(forms) - 1) / 2) for index in range(len(timings))]
            axes.barh(places, rates, 0.95 * width, color=colour, label=name)
        for index, timing in enumerate(timings):
            longest = max(rates[index] for rates in forms.values())
            text = ", ".join(f"{ratio:.2f}" for ratio in (timing.ratio, *timing.other_ratios.values())) + " times"
            axes.annotate(text, (longest, index), (4, 0), textcoords="offset points", va="center")
        all_rates = [rate for rates in forms.values() for rate in rates]
        least, most = min(all_rates) / 2, max(all_rates)
        axes.set(xscale="log", xlabel="Tokens per second", xlim=(least, most * (most / least) ** 0.2))  # room for text
        axes.set_yticks(range(len(timings)), [timing.work for timing in timings])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        show_round_numbers(axes.xaxis)
        add_legend(figure, axes.containers)
    return files
