//! The spread of repeated measurements.

/// The middle, the smallest and the largest of some values.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Spread {
    /// Median; of an even number of values the mean of the two in the middle.
    pub(crate) median: f64,
    /// Smallest.
    pub(crate) min: f64,
    /// Largest.
    pub(crate) max: f64,
}

impl Spread {
    /// Of these values; none of none.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let upper = *values.get(values.len() / 2)?;
        let median = if values.len() % 2 == 1 {
            upper
        } else {
            f64::midpoint(values[values.len() / 2 - 1], upper)
        };
        Some(Self {
            median,
            min: *values.first()?,
            max: *values.last()?,
        })
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn of__odd_even_none() {
        let spread = |median, min, max| Spread { median, min, max };
        assert_eq!(Spread::of([9.0, 1.0, 2.0]), Some(spread(2.0, 1.0, 9.0)));
        assert_eq!(
            Spread::of([4.0, 1.0, 2.0, 9.0]),
            Some(spread(3.0, 1.0, 9.0))
        );
        assert_eq!(Spread::of([]), None);
    }
}
