from optimum_neuronal.comparing.figures.styles import make_styles


def test_methods_differ_and_depend_on_their_order_alone():
    names = [f"method {index}" for index in range(40)]
    styles = make_styles(names)
    assert len({(style.colour, style.face) for style in styles.values()}) == 40
    assert len({(style.colour, style.marker, style.dashes) for style in styles.values()}) == 40
    assert make_styles(["b", "a", "b"]) == make_styles(["b", "a"]) and make_styles(["b"])["b"] == styles[names[0]]
