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
    let (first, last) = (start.0, start.unchecked_add(last).0);
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

/// Returns whether all pages of a chain can be used.
pub(super) fn can_use_all(chain: &Chain<'_>, memory: &GuestMemoryMmap) -> bool {
    CHECK.get().is_none()
        || chain
            .clone()
            .all(|part| can_use(memory, part.addr(), part.len()))
}
