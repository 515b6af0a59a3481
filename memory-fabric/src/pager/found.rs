//! Pages that exist in the file although their bytes are elsewhere, or nowhere.
//!
//! A host can be configured to use huge pages for all shared memory. A write into the file may then
//! create zero pages for neighbours that are remote or untouched, and a freed page stays, zeroed,
//! when its huge page cannot be split at the moment. A page to be created may therefore already
//! exist: it is overwritten and mapped.

use super::{PagerError, Shared};
use crate::page::{PAGE_SIZE, PageBytes, PageIndex, PageRange};
use crate::uffd::{Mapped, Protection};
use std::io;

/// The failing operation when bytes cannot be written to the file.
pub(super) const WRITING: &str = "writing into the memory file";

static ZEROES: PageBytes = [0; PAGE_SIZE];

/// Fills pages that the caller holds with zeroes, maps them, and wakes their waiters. They are
/// writable.
pub(super) fn make_zero(shared: &Shared, run: PageRange) -> Result<(), PagerError> {
    for page in run.iter() {
        // Writes from now on do not fault.
        shared.map.entry(page).mark_dirty();
    }
    let mut rest = run;
    while rest.count > 0 {
        let target = shared.memory.guest_page(rest.first);
        let made = shared.uffd.zero(target, rest.count as usize);
        let made = made.map_err(failed("ZEROPAGE", rest.first))?;
        (_, rest) = rest.split_at(u32::try_from(made).unwrap_or(rest.count));
        if rest.count > 0 {
            write_over(shared, rest.first, &ZEROES, Protection::Writable)?;
            (_, rest) = rest.split_at(1);
        }
    }
    Ok(())
}

/// Overwrites a page that exists in the file, and maps it. It is not mapped writable: the caller
/// holds it, and its bytes were not local.
pub(super) fn write_over(
    shared: &Shared,
    page: PageIndex,
    bytes: &PageBytes,
    protection: Protection,
) -> Result<(), PagerError> {
    // Further writes would create more such pages, each beyond the budget.
    shared.memory.write_by_view();
    let written = shared.memory.write(page, bytes);
    written.map_err(failed(WRITING, page))?;
    let protection = if shared.continue_write_protected {
        protection
    } else {
        shared.map.entry(page).mark_dirty();
        Protection::Writable
    };
    map_here(shared, page, protection)
}

/// Maps a page that the caller holds and whose bytes are in the file, and wakes its waiters.
pub(super) fn map_here(
    shared: &Shared,
    page: PageIndex,
    protection: Protection,
) -> Result<(), PagerError> {
    let target = shared.memory.guest_page(page);
    let mapped = shared.uffd.map_existing(target, protection);
    if mapped.map_err(failed("CONTINUE", page))? == Mapped::Now {
        return Ok(());
    }
    // Mapped in the meantime, possibly still write-protected. Both calls wake the waiters.
    if protection == Protection::Writable {
        let allowed = shared.uffd.allow_writes(target);
        allowed.map_err(failed("WRITEPROTECT", page))?;
    }
    shared.uffd.wake(target).map_err(failed("WAKE", page))
}

pub(super) fn failed(call: &'static str, page: PageIndex) -> impl FnOnce(io::Error) -> PagerError {
    move |source| PagerError::Userfaultfd { call, page, source }
}

#[cfg(test)]
mod tests;
