//! The colours of a picture's lines.

use std::collections::BTreeMap;

use plotters::prelude::*;

const STREAM: RGBColor = RGBColor(0x00, 0x72, 0x54);
const VERMILION: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
const SKY: RGBColor = RGBColor(0x56, 0xb4, 0xe9);
const ORANGE: RGBColor = RGBColor(0xe6, 0x9f, 0x00);
const BLUE: RGBColor = RGBColor(0x00, 0x72, 0xb2);
const PURPLE: RGBColor = RGBColor(0xcc, 0x79, 0xa7);
const GREEN: RGBColor = RGBColor(0x00, 0x9e, 0x73);
const GREY: RGBColor = RGBColor(0x99, 0x99, 0x99);
const YELLOW: RGBColor = RGBColor(0xf0, 0xe4, 0x42);

/// Told apart by the colour-blind, too (Okabe, Ito), in the order in which they are taken by lines
/// that have none of their own.
const COLORS: [RGBColor; 10] = [
    STREAM, VERMILION, SKY, ORANGE, BLUE, PURPLE, BLACK, GREY, GREEN, YELLOW,
];

/// The colours of one picture: a transport's own, as in every other picture, unless another line of
/// this one has it. More than ten lines share some.
pub(super) struct Palette(BTreeMap<String, RGBColor>);

impl Palette {
    /// For lines of these names.
    pub(super) fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let mut colors: BTreeMap<String, RGBColor> = BTreeMap::new();
        let mut others = Vec::new();
        for name in names {
            match own(name) {
                Some(color) if !colors.values().any(|taken| *taken == color) => {
                    colors.insert(name.to_owned(), color);
                }
                _ => others.push(name),
            }
        }
        let taken: Vec<RGBColor> = colors.values().copied().collect();
        let free = COLORS.iter().filter(|color| !taken.contains(color));
        let free: Vec<RGBColor> = free.chain(&COLORS).copied().collect();
        let others = others.into_iter().map(str::to_owned);
        colors.extend(others.zip(free.into_iter().cycle()));
        Self(colors)
    }

    /// That of a line.
    pub(super) fn color(&self, name: &str) -> RGBColor {
        self.0.get(name).copied().unwrap_or(BLACK)
    }
}

/// That of a transport, whatever its parameters, whichever of several flows, and however packets get
/// lost.
fn own(line: &str) -> Option<RGBColor> {
    let transport = line.split_once(": ").map_or(line, |(_, rest)| rest);
    let transport = transport.split(['?', ',']).next().unwrap_or_default();
    Some(match transport {
        "graft:stream" => STREAM,
        "hook:graft:stream" => BLUE,
        "tcp-cubic" => VERMILION,
        "tcp-bbr" => SKY,
        "quic" | "graft:go-back-n" => ORANGE,
        "quic-bbr" | "hook:quic" | "graft:partial-reliability" => PURPLE,
        "udp" | "graft:stop-and-wait" => GREY,
        "graft:selective-repeat" => GREEN,
        "graft:canonical" | "hook:udp" => BLACK,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of__transports_keep_theirs() {
        for names in [
            &["graft:stream", "tcp-cubic"][..],
            &["1: graft:stream", "2: tcp-cubic"],
            &["a", "graft:stream?x=1", "tcp-cubic, bursts"],
        ] {
            let palette = Palette::of(names.iter().copied());
            let last: Vec<_> = names.iter().rev().map(|n| palette.color(n)).collect();
            assert_eq!(last[..2], [VERMILION, STREAM]);
        }
    }

    #[test]
    fn of__no_two_lines_have_the_same() {
        let names = [
            "1: graft:stream",
            "2: graft:stream",
            "graft:go-back-n?window=16",
            "graft:go-back-n?window=64",
            "graft:partial-reliability",
            "graft:somebodys",
            "graft:stop-and-wait",
            "quic",
            "quic-bbr",
            "udp",
        ];
        let palette = Palette::of(names);
        for (i, one) in names.iter().enumerate() {
            for other in &names[i + 1..] {
                let (a, b) = (palette.color(one), palette.color(other));
                assert_ne!(a, b, "{one} and {other}");
            }
        }
    }

    #[test]
    fn of__more_lines_than_colors() {
        let names: Vec<String> = (0..25).map(|i| format!("transport {i}")).collect();
        let palette = Palette::of(names.iter().map(String::as_str));
        assert_eq!(palette.0.len(), 25);
    }
}
