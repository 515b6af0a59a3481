//! Pages of the guest's memory that are lost: a device looks at a page before it uses it.

use std::sync::OnceLock;

use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::Chain;

/// Returns whether the page at an address of this process can be used.
pub type PageCheck = fn(*const u8) -> bool;

static CHECK: OnceLock<PageCheck> = OnceLock::new();

const PAGE_BYTES: u64 = 4096;

/// Looks at pages by this function from now on. Without one all pages can be used.
pub fn check_pages_by(check: PageCheck) {
    // There is one in a process.
    let _ = CHECK.set(check);
}

/// Returns whether all pages of a range can be used. Those outside the guest's memory count as
/// usable: they are refused elsewhere.
pub(super) fn can_use(memory: &GuestMemoryMmap, start: GuestAddress, bytes: u32) -> bool {
    let Some(check) = CHECK.get() else {
        return true;
    };
    let Some(last) = u64::from(bytes).checked_sub(1) else {
        return true;
    };
    let (first, last) = (start.0, start.0.saturating_add(last));
    let mut next = first;
    loop {
        let place = memory.get_host_address(GuestAddress(next));
        if place.is_ok_and(|place| !check(place)) {
            return false;
        }
        match (next | (PAGE_BYTES - 1)).checked_add(1) {
            Some(page) if page <= last => next = page,
            _ => return true,
        }
    }
}

/// Bytes of a chain in each direction whose pages are looked at: twice as many as the longest request
/// of a device has. A chain may have 4 GiB, and each look may fetch a page.
const LOOKED_AT_BYTES_MAX: u32 = 16 << 20;

/// Returns whether all pages of a chain that a device uses can be used: those at the beginning of each
/// direction, and the last byte that it writes, where a disk has the status.
pub(super) fn can_use_all(chain: &Chain<'_>, memory: &GuestMemoryMmap) -> bool {
    if CHECK.get().is_none() {
        return true;
    }
    let parts = chain.clone();
    can_use_parts(
        memory,
        parts.map(|part| (part.is_write_only(), part.addr(), part.len())),
    )
}

/// The same of its parts: whether the driver has each to be written, and where it is.
fn can_use_parts(
    memory: &GuestMemoryMmap,
    mut parts: impl Iterator<Item = (bool, GuestAddress, u32)>,
) -> bool {
    let mut left = [LOOKED_AT_BYTES_MAX; 2];
    let mut last = None;
    let can_use_first = parts.all(|(is_written, start, bytes)| {
        if let (true, Some(before)) = (is_written, bytes.checked_sub(1)) {
            last = start.checked_add(before.into());
        }
        let left = &mut left[usize::from(is_written)];
        let bytes = bytes.min(*left);
        *left -= bytes;
        can_use(memory, start, bytes)
    });
    can_use_first && last.is_none_or(|last| can_use(memory, last, 1))
}

/// Pages that tests declare as lost.
#[cfg(test)]
pub(super) mod testing {
    use std::sync::Mutex;

    use super::*;

    static LOST: Mutex<Vec<usize>> = Mutex::new(Vec::new());

    fn check(place: *const u8) -> bool {
        let page = place.addr() & !0xfff;
        !crate::lock(&LOST).contains(&page)
    }

    /// A lost page, until it is dropped: other memory may have its address then.
    #[must_use]
    pub struct Lost(usize);

    impl Lost {
        /// Loses the page at a guest-physical address.
        pub fn at(memory: &GuestMemoryMmap, page: u64) -> Self {
            let place = memory.get_host_address(GuestAddress(page)).expect("there");
            crate::lock(&LOST).push(place.addr());
            check_pages_by(check);
            Self(place.addr())
        }
    }

    impl Drop for Lost {
        fn drop(&mut self) {
            crate::lock(&LOST).retain(|&page| page != self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_much_of_a_chain_is_looked_at_as_a_device_may_use() {
        let bytes = 3 * LOOKED_AT_BYTES_MAX;
        let size = usize::try_from(bytes).unwrap();
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)]).unwrap();
        let lost_at = u64::from(LOOKED_AT_BYTES_MAX) + 0x1000;
        let _lost = testing::Lost::at(&memory, lost_at);
        let part = |is_written, start: u64, bytes| (is_written, GuestAddress(start), bytes);
        let can_use = |parts: &[_]| can_use_parts(&memory, parts.iter().copied());
        assert!(can_use(&[part(true, 0, bytes)]));
        assert!(can_use(&[
            part(true, 0, LOOKED_AT_BYTES_MAX),
            part(true, lost_at, 1),
            part(true, 0, 1),
        ]));
        // The status of a disk's request.
        assert!(!can_use(&[
            part(true, 0, LOOKED_AT_BYTES_MAX),
            part(true, lost_at, 1),
        ]));
        // Each direction counts for itself.
        assert!(!can_use(&[
            part(true, 0, LOOKED_AT_BYTES_MAX),
            part(false, lost_at, 1)
        ]));
    }

    #[test]
    fn a_range_can_be_used_unless_one_of_its_pages_is_lost() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x8000)]).unwrap();
        let _lost = testing::Lost::at(&memory, 0x3000);
        for (start, bytes, usable) in [
            (0x2000, 0x1000, true),
            (0x2000, 0x1001, false),
            (0x2fff, 2, false),
            (0x3fff, 1, false),
            (0x4000, 0x4000, true),
            (0x1234, 0x6000, false),
            (0x3000, 0, true),
            // Outside, which others refuse.
            (0x8000, 0x1000, true),
            (u64::MAX - 1, 2, true),
            (u64::MAX, u32::MAX, true),
        ] {
            let found = can_use(&memory, GuestAddress(start), bytes);
            assert_eq!(found, usable, "{bytes} bytes at {start:#x}");
        }
    }
}
