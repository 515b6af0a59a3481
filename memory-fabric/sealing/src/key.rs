//! The keys of a VM, and what is done with them.

use fabric_pages::page::PageBytes;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use zeroize::{Zeroize, Zeroizing};

/// Write-backs under one key: 2^36 pages, 256 TiB, 2^44 blocks of AES. An attacker who sees all of
/// them distinguishes AES-GCM with unique nonces from random bytes with a probability of at most
/// (2^44)^2 / 2^129 = 2^-41 (Iwata, Ohashi and Minematsu, CRYPTO 2012, theorem 1).
const PAGES_PER_KEY_BITS: u32 = 36;

/// Keys of a VM. With [`PAGES_PER_KEY_BITS`] it can write back 2^48 pages, 1 EiB: 2.9 years at
/// 100 Gbit/s.
const KEYS_MAX: usize = 1 << 12;

/// The number of the first write-back. 0 is a page that was never written back.
const FIRST_NUMBER: u64 = 1;

/// Why a page cannot be sealed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum KeyError {
    /// The numbers are used up.
    #[error(
        "{} pages were written back, which is the limit of a VM whose pages are sealed; restart \
         it, or use --seal off",
        (KEYS_MAX as u64) << PAGES_PER_KEY_BITS
    )]
    UsedUp,
    /// The host has no random numbers.
    #[error("the host has no random numbers for a key that seals pages")]
    NoRandomNumbers,
}

/// The bytes are not those that were sealed.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the bytes are not those that were written back last")]
pub struct NotGenuine;

/// Where a page is stored. Authenticated with it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Place {
    /// The node that stores it, or another name of its link.
    pub node: u32,
    /// Offset of the page in the lease, in bytes.
    pub offset: u64,
}

impl Place {
    /// The additional authenticated data: node, zeroes and offset, little-endian.
    fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&self.node.to_le_bytes());
        bytes[8..].copy_from_slice(&self.offset.to_le_bytes());
        bytes
    }
}

/// What opens a sealed page.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Seal {
    /// The number of the write-back: unique in a VM, from 1 on.
    pub number: u64,
    /// The tag of AES-GCM.
    pub tag: [u8; 16],
}

/// A key, whose bytes are overwritten when it is dropped.
///
/// Copies of them that the compiler left on the stack of the thread that expanded the key are not.
struct PageKey(Box<Expanded>);

/// The expanded key, where it is overwritten.
struct Expanded(MaybeUninit<LessSafeKey>);

// Overwriting the bytes is all that has to be done at the end.
const _: () = assert!(!std::mem::needs_drop::<LessSafeKey>());

impl PageKey {
    fn random() -> Result<Self, KeyError> {
        let mut bytes = Zeroizing::new([0; 32]);
        SystemRandom::new()
            .fill(&mut *bytes)
            .map_err(|_| KeyError::NoRandomNumbers)?;
        let key = UnboundKey::new(&AES_256_GCM, &*bytes).expect("32 bytes");
        let key = Expanded(MaybeUninit::new(LessSafeKey::new(key)));
        Ok(Self(Box::new(key)))
    }

    fn get(&self) -> &LessSafeKey {
        // SAFETY: initialized by `random`, the only constructor, and overwritten only by `drop`.
        unsafe { self.0.0.assume_init_ref() }
    }
}

impl Drop for Expanded {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// The secret of a VM, from which everything about its pages at donors follows. It exists in this
/// process only, for one boot of the guest.
pub struct VmKey {
    /// Made when they are first needed. The number of a write-back says which one it used.
    keys: Box<[OnceLock<PageKey>]>,
    /// The number of the next write-back.
    next: AtomicU64,
}

impl fmt::Debug for VmKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The keys are secret.
        f.debug_struct("VmKey")
            .field("next", &self.next)
            .finish_non_exhaustive()
    }
}

impl VmKey {
    /// Makes a random key.
    ///
    /// # Errors
    ///
    /// [`KeyError::NoRandomNumbers`].
    pub fn random() -> Result<Self, KeyError> {
        let key = Self {
            keys: (0..KEYS_MAX).map(|_| OnceLock::new()).collect(),
            next: AtomicU64::new(FIRST_NUMBER),
        };
        key.sealing_key(FIRST_NUMBER)?;
        Ok(key)
    }

    fn index(number: u64) -> usize {
        usize::try_from(number >> PAGES_PER_KEY_BITS).unwrap_or(usize::MAX)
    }

    /// Returns the key of a number, and makes it if it is the first: once in 2^36 write-backs.
    fn sealing_key(&self, number: u64) -> Result<&LessSafeKey, KeyError> {
        let slot = self.keys.get(Self::index(number));
        let slot = slot.ok_or(KeyError::UsedUp)?;
        if slot.get().is_none() {
            // If another thread was faster, its key is used by both.
            let _ = slot.set(PageKey::random()?);
        }
        Ok(slot.get().expect("it was set").get())
    }

    /// Encrypts a page in place. Each call takes a number of its own, also if it fails.
    ///
    /// # Errors
    ///
    /// See [`KeyError`]; the page is unchanged then.
    pub fn seal(&self, place: Place, page: &mut PageBytes) -> Result<Seal, KeyError> {
        // Relaxed: only the number has to be unique. It does not wrap: 2^64 calls take centuries.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let key = self.sealing_key(number)?;
        let tag = key
            .seal_in_place_separate_tag(nonce(number), Aad::from(place.to_bytes()), page)
            .expect("a page is shorter than the limit of 64 GiB");
        let tag = tag.as_ref().try_into().expect("16 bytes");
        Ok(Seal { number, tag })
    }

    /// Decrypts a page in place.
    ///
    /// # Errors
    ///
    /// [`NotGenuine`] when it is not what was sealed with this number for this place. The bytes are
    /// meaningless then.
    pub fn open(&self, place: Place, seal: Seal, page: &mut PageBytes) -> Result<(), NotGenuine> {
        let key = self.keys.get(Self::index(seal.number));
        let key = key.and_then(OnceLock::get).ok_or(NotGenuine)?.get();
        let (nonce, tag) = (nonce(seal.number), Tag::from(seal.tag));
        let aad = Aad::from(place.to_bytes());
        match key.open_in_place_separate_tag(nonce, aad, tag, page, 0..) {
            Ok(_) => Ok(()),
            Err(_) => Err(NotGenuine),
        }
    }
}

/// The nonce of a write-back: its number, little-endian, and four zeroes.
fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::mem::ManuallyDrop;

    const PLACE: Place = Place {
        node: 2,
        offset: 40_960,
    };

    fn page(seed: usize) -> PageBytes {
        std::array::from_fn(|byte| (seed.wrapping_mul(31) ^ byte).to_le_bytes()[0])
    }

    #[test]
    fn a_sealed_page_opens_and_shows_nothing_before() {
        let key = VmKey::random().expect("a key");
        let mut bytes = page(1);
        let seal = key.seal(PLACE, &mut bytes).expect("sealed");
        assert_eq!(seal.number, 1);
        let equal = bytes.iter().zip(&page(1)).filter(|(a, b)| a == b).count();
        assert!(equal < 64, "{equal} of 4096 bytes are as before");
        key.open(PLACE, seal, &mut bytes).expect("opened");
        assert_eq!(bytes, page(1));
    }

    #[test]
    fn the_same_page_is_sealed_differently_each_time_and_by_each_vm() {
        let (one, other) = (VmKey::random().unwrap(), VmKey::random().unwrap());
        let sealed = |key: &VmKey| {
            let mut bytes = page(7);
            let seal = key.seal(PLACE, &mut bytes).expect("sealed");
            (bytes, seal)
        };
        let (first, second, foreign) = (sealed(&one), sealed(&one), sealed(&other));
        assert_ne!(first.0, second.0);
        assert_ne!(
            (first.1.number, first.1.tag),
            (second.1.number, second.1.tag)
        );
        assert_eq!(first.1.number, foreign.1.number);
        assert_ne!(first.0, foreign.0);
        let mut bytes = foreign.0;
        assert_eq!(one.open(PLACE, foreign.1, &mut bytes), Err(NotGenuine));
    }

    #[test]
    fn a_number_is_never_used_twice_by_threads_that_seal_at_once() {
        let key = VmKey::random().expect("a key");
        let mut numbers = std::thread::scope(|scope| {
            let seal = || {
                let mut bytes = page(0);
                let seals = (0..500).map(|_| key.seal(PLACE, &mut bytes).expect("sealed").number);
                seals.collect::<Vec<_>>()
            };
            let threads = [scope.spawn(seal), scope.spawn(seal), scope.spawn(seal)];
            threads.map(|thread| thread.join().expect("seals")).concat()
        });
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=1500).collect::<Vec<_>>());
    }

    #[test]
    fn a_new_key_follows_after_so_many_pages_and_the_old_ones_still_open() {
        let key = VmKey::random().expect("a key");
        let last = (1 << PAGES_PER_KEY_BITS) - 1;
        key.next.store(last, Ordering::Relaxed);
        let sealed: Vec<_> = (0..2)
            .map(|seed| {
                let mut bytes = page(seed);
                let seal = key.seal(PLACE, &mut bytes).expect("sealed");
                (seal, bytes)
            })
            .collect();
        assert_eq!((sealed[0].0.number, sealed[1].0.number), (last, last + 1));
        assert!(key.keys[0].get().is_some() && key.keys[1].get().is_some());
        for (seed, (seal, mut bytes)) in sealed.into_iter().enumerate() {
            key.open(PLACE, seal, &mut bytes).expect("opened");
            assert_eq!(bytes, page(seed));
        }
    }

    #[test]
    fn after_the_last_number_nothing_is_sealed() {
        let key = VmKey::random().expect("a key");
        let end = (KEYS_MAX as u64) << PAGES_PER_KEY_BITS;
        key.next.store(end - 1, Ordering::Relaxed);
        let mut bytes = page(3);
        assert_eq!(
            key.seal(PLACE, &mut bytes).expect("the last").number,
            end - 1
        );
        let mut bytes = page(3);
        for _ in 0..2 {
            assert_eq!(key.seal(PLACE, &mut bytes), Err(KeyError::UsedUp));
            assert_eq!(bytes, page(3));
        }
        assert!(
            KeyError::UsedUp
                .to_string()
                .contains("281474976710656 pages")
        );
    }

    #[test]
    fn a_dropped_key_leaves_no_byte_of_it() {
        let PageKey(key) = PageKey::random().expect("a key");
        let mut key = ManuallyDrop::new(*key);
        let bytes = |key: &Expanded| {
            let first = key.0.as_ptr().cast::<MaybeUninit<u8>>();
            // SAFETY: it has so many bytes, which are there after its drop too. Those that are read
            // belong to the expanded key or were written by `zeroize`; padding is counted below but
            // decides nothing.
            let bytes = unsafe { std::slice::from_raw_parts(first, size_of::<LessSafeKey>()) };
            // SAFETY: as above.
            let set = |byte: &&MaybeUninit<u8>| unsafe { byte.assume_init() } != 0;
            bytes.iter().filter(set).count()
        };
        assert!(bytes(&key) > 200, "an expanded key of AES-256");
        // SAFETY: nothing of it is used after that but its bytes.
        unsafe { ManuallyDrop::drop(&mut key) };
        assert_eq!(bytes(&key), 0);
    }

    proptest! {
        #[test]
        fn any_change_of_bytes_number_tag_or_place_is_detected(
            byte in 0..4096_usize, bit in 0..8_u32, which in 0..4_u8, other in 1..u64::MAX,
        ) {
            let key = VmKey::random().expect("a key");
            let mut bytes = page(5);
            let mut seal = key.seal(PLACE, &mut bytes).expect("sealed");
            let mut place = PLACE;
            match which {
                0 => bytes[byte] ^= 1 << bit,
                1 => seal.tag[byte % 16] ^= 1 << bit,
                2 => seal.number ^= other,
                _ if bit % 2 == 0 => place.offset ^= other,
                _ => place.node ^= 1 << (byte % 32),
            }
            prop_assert_eq!(key.open(place, seal, &mut bytes), Err(NotGenuine));
        }
    }
}
