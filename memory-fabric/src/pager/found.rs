//! Pages that the file has although their bytes are elsewhere, or nowhere.
//!
//! A host can be set to make huge pages of shared memory where nobody asks for them. Then a write
//! into the file may make pages of zeroes of neighbours that are remote or untouched, and a page
//! that is freed stays, zeroed, when its huge page cannot be split just then. So what has to be
//! made may be found to be there: it is written over, and mapped.

use super::{PagerError, Shared};
use crate::page::{PAGE_SIZE, PageBytes, PageIndex, PageRange};
use crate::uffd::{Mapped, Protection};
use std::io;

/// What failed when bytes cannot be put into the file.
pub(super) const WRITING: &str = "writing into the memory file";

static ZEROES: PageBytes = [0; PAGE_SIZE];

/// Makes a page that the caller holds from these bytes, maps it, and wakes who waits for it. It is
/// dirty already when it is to be writable.
pub(super) fn make(
    shared: &Shared,
    page: PageIndex,
    bytes: &PageBytes,
    protection: Protection,
) -> Result<(), PagerError> {
    let target = shared.memory.guest_page(page);
    match shared.uffd.copy(target, bytes, protection) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
            write_over(shared, page, bytes, protection)
        }
        made => made.map_err(failed("COPY", page)),
    }
}

/// Makes pages of zeroes that the caller holds, as [`make`] does. They are writable.
pub(super) fn make_zero(shared: &Shared, run: PageRange) -> Result<(), PagerError> {
    for page in run.iter() {
        // Writes from now on are not seen.
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

/// Gives a page that is in the file its bytes, and maps it. Nobody else has it mapped for writing:
/// the caller holds it, and its bytes were not here.
fn write_over(
    shared: &Shared,
    page: PageIndex,
    bytes: &PageBytes,
    protection: Protection,
) -> Result<(), PagerError> {
    // There would be more such pages, each beyond the budget.
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

/// Maps a page that the caller holds and whose bytes are in the file, and wakes who waits for it.
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
    // Mapped meanwhile; the mapping may be protected still. Both calls wake.
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
