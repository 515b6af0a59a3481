//! Sets of interrupt vectors.

/// A bit for each of the 256 vectors, in words of 32 as the registers have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vectors(pub [u32; 8]);

fn place(vector: u8) -> (usize, u32) {
    (usize::from(vector / 32), 1 << (vector % 32))
}

impl Vectors {
    /// Adds a vector.
    pub fn insert(&mut self, vector: u8) {
        let (word, bit) = place(vector);
        self.0[word] |= bit;
    }

    /// Removes a vector.
    pub fn remove(&mut self, vector: u8) {
        let (word, bit) = place(vector);
        self.0[word] &= !bit;
    }

    /// Whether the vector is in the set.
    #[must_use]
    pub fn contains(&self, vector: u8) -> bool {
        let (word, bit) = place(vector);
        self.0[word] & bit != 0
    }

    /// The vector with the highest number, which has the highest priority.
    #[must_use]
    pub fn highest(&self) -> Option<u8> {
        let index = self.0.iter().rposition(|word| *word != 0)?;
        let below = u8::try_from(index * 32).ok()?;
        u8::try_from(self.0[index].ilog2()).ok()?.checked_add(below)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_highest_is_that_of_a_set(vectors in proptest::collection::btree_set(any::<u8>(), 0..20)) {
            let mut set = Vectors::default();
            for vector in &vectors {
                set.insert(*vector);
            }
            for vector in vectors.iter().rev() {
                prop_assert_eq!(set.highest(), Some(*vector));
                prop_assert!(set.contains(*vector));
                set.remove(*vector);
            }
            prop_assert_eq!(set.highest(), None);
        }
    }
}
