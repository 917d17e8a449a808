//! Figures on the command line, with or without their unit.

use std::num::NonZeroU32;

/// Parses a time in milliseconds: `10` or `10ms`.
///
/// # Errors
/// One sentence that says what is expected.
pub fn milliseconds(text: &str) -> Result<f64, String> {
    let figure = figure(text, &["ms"]);
    figure.ok_or_else(|| "expected milliseconds, such as 10 or 10ms".into())
}

/// Parses a share in per cent: `2.5` or `2.5%`.
///
/// # Errors
/// One sentence that says what is expected.
pub fn per_cent(text: &str) -> Result<f64, String> {
    let figure = figure(text, &["%"]);
    figure.ok_or_else(|| "expected per cent, such as 2.5 or 2.5%".into())
}

/// Parses a rate in Mbit/s: `100`, `100Mbit` or `100Mbit/s`.
///
/// # Errors
/// One sentence that says what is expected.
pub fn mbit_per_second(text: &str) -> Result<f64, String> {
    let figure = figure(text, &["mbit/s", "mbit"]);
    figure.ok_or_else(|| "expected Mbit/s, such as 100 or 100Mbit".into())
}

/// Parses a time of at least a second, in whole ones: `90s`, `10min`, `8h`.
///
/// # Errors
/// One sentence that says what is expected.
pub fn seconds(text: &str) -> Result<NonZeroU32, String> {
    let time = humantime::parse_duration(text).ok();
    let seconds = time.and_then(|time| u32::try_from(time.as_secs()).ok());
    let seconds = seconds.and_then(NonZeroU32::new);
    seconds.ok_or_else(|| "expected a time from a second on, such as 90s, 10min or 8h".into())
}

/// Parses a number of bytes, at least one: `65536`, `64KiB` or `1.5MB`.
///
/// # Errors
/// One sentence that says what is expected.
pub fn bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, f64); 7] = [
        ("kib", 1024.0),
        ("mib", 1048576.0),
        ("gib", 1073741824.0),
        ("kb", 1e3),
        ("mb", 1e6),
        ("gb", 1e9),
        ("b", 1.0),
    ];
    let small = text.trim().to_ascii_lowercase();
    let unit = UNITS.iter().find(|(unit, _)| small.ends_with(unit));
    let bytes = figure(text, unit.map(|(unit, _)| *unit).as_slice())
        .map(|figure| (figure * unit.map_or(1.0, |(_, factor)| *factor)).round())
        .filter(|bytes| (1.0..=1e15).contains(bytes));
    bytes.map_or_else(
        || Err("expected bytes, such as 65536, 64KiB or 1.5MB".into()),
        |bytes| Ok(bytes as u64),
    )
}

/// A finite number, perhaps with one of `units` behind it.
fn figure(text: &str, units: &[&str]) -> Option<f64> {
    let text = text.trim().to_ascii_lowercase();
    let number = units.iter().find_map(|unit| text.strip_suffix(unit));
    let figure: f64 = number.unwrap_or(&text).trim_end().parse().ok()?;
    figure.is_finite().then_some(figure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figure__with_or_without_its_unit() {
        for text in ["10", "10ms", "10 ms", " 10.0MS "] {
            assert_eq!(milliseconds(text), Ok(10.0), "{text}");
        }
        for text in ["2.5", "2.5%", "2.5 %"] {
            assert_eq!(per_cent(text), Ok(2.5), "{text}");
        }
        for text in ["100", "100Mbit", "100mbit", "100 Mbit/s"] {
            assert_eq!(mbit_per_second(text), Ok(100.0), "{text}");
        }
    }

    #[test]
    fn seconds__are_whole_and_some() {
        for (text, expected) in [("90s", 90), ("10min", 600), ("1h 1s", 3601)] {
            assert_eq!(seconds(text).map(NonZeroU32::get), Ok(expected), "{text}");
        }
        for text in ["", "10", "0s", "900ms", "-1s", "9000years", "soon"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bytes__with_or_without_a_unit() {
        for (text, expected) in [
            ("65536", 65536),
            ("64KiB", 65536),
            ("64 kib", 65536),
            ("1.5MB", 1_500_000),
            ("1GiB", 1 << 30),
            ("9b", 9),
        ] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "0", "-1", "1 Mbit", "1TiB", "kb", "nan", "1e300", "0.2"] {
            let message = bytes(text).expect_err(text);
            assert!(message.starts_with("expected bytes"), "{text}");
        }
    }

    #[test]
    fn figure__refuses_other_units_and_what_is_no_number() {
        for text in ["", "ms", "ten", "10s", "10 msms", "10%", "nan", "infms"] {
            let message = milliseconds(text).expect_err(text);
            assert_eq!(message, "expected milliseconds, such as 10 or 10ms");
        }
        assert!(per_cent("2ms").is_err());
        assert!(mbit_per_second("1Gbit").is_err());
    }
}
