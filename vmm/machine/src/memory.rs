//! The regions of guest memory, and checks of their sizes.

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::error::MachineError;
use crate::layout::{DEVICE_HOLE_END, DEVICE_HOLE_START, MEMORY_BYTES_MIN, PAGE_BYTES};

/// Returns the ranges of guest-physical memory of a machine with `bytes` of memory, as start and
/// length in bytes: below the device hole, and the rest from 4 GiB on. Ranges are never empty.
///
/// The memory given to [`Machine::new`](crate::Machine::new) has exactly these regions.
pub fn guest_memory_ranges(bytes: u64) -> Vec<(GuestAddress, u64)> {
    let low = bytes.min(DEVICE_HOLE_START);
    let high = bytes - low;
    [
        (GuestAddress(0), low),
        (GuestAddress(DEVICE_HOLE_END), high),
    ]
    .into_iter()
    .filter(|(_, len)| *len > 0)
    .collect()
}

/// Alignment of memory that is added: the largest block size of Linux's memory hot-plug
/// (arch/x86/mm/init_64.c, `MAX_BLOCK_SIZE`).
const HOTPLUG_ALIGNMENT: u64 = 2 << 30;

/// Returns the first address for memory that may be added to a machine with `bytes` of memory.
pub fn hotplug_start(bytes: u64) -> GuestAddress {
    let ranges = guest_memory_ranges(bytes);
    let end = ranges.last().map_or(0, |(start, len)| start.0 + len);
    GuestAddress(end.max(DEVICE_HOLE_END).next_multiple_of(HOTPLUG_ALIGNMENT))
}

/// Returns the ranges of [`guest_memory_ranges`], and after them the one to which `hotplug_bytes` may
/// be added, if any.
pub fn all_memory_ranges(bytes: u64, hotplug_bytes: u64) -> Vec<(GuestAddress, u64)> {
    let added = (hotplug_bytes > 0).then(|| (hotplug_start(bytes), hotplug_bytes));
    guest_memory_ranges(bytes)
        .into_iter()
        .chain(added)
        .collect()
}

/// Sizes of a guest memory whose regions were checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemorySize {
    /// Bytes of all regions.
    pub total: u64,
    /// End of RAM below the hole.
    pub low_end: u64,
}

/// Checks that `memory` has exactly the regions of [`guest_memory_ranges`] for its size, followed
/// by the region to which memory may be added, if any.
pub(crate) fn check_memory(
    memory: &GuestMemoryMmap,
    hotplug_bytes: u64,
) -> Result<MemorySize, MachineError> {
    let regions: Vec<_> = memory.iter().map(|r| (r.start_addr(), r.len())).collect();
    let at_start = match hotplug_bytes {
        0 => &regions[..],
        _ => regions.split_last().map_or(&[][..], |(_, others)| others),
    };
    let total = at_start
        .iter()
        .fold(0u64, |total, (_, len)| total.saturating_add(*len));
    if total % PAGE_BYTES != 0 {
        return Err(MachineError::MemoryNotPages { bytes: total });
    }
    if total < MEMORY_BYTES_MIN {
        return Err(MachineError::MemoryTooSmall { bytes: total });
    }
    if regions != all_memory_ranges(total, hotplug_bytes) {
        return Err(MachineError::MemoryRegions { bytes: total });
    }
    Ok(MemorySize {
        total,
        low_end: total.min(DEVICE_HOLE_START),
    })
}

/// Checks that addresses of this memory have at most `bits` bits.
pub(crate) fn check_address_bits(size: MemorySize, bits: u32) -> Result<(), MachineError> {
    let addresses = 1_u64.checked_shl(bits).unwrap_or(u64::MAX);
    // Memory above the hole begins after it.
    let hole = DEVICE_HOLE_END - DEVICE_HOLE_START;
    let limit = addresses
        .saturating_sub(hole)
        .max(addresses.min(DEVICE_HOLE_START));
    if size.total > limit {
        return Err(MachineError::MemoryTooLarge {
            bytes: size.total,
            bits,
            limit,
        });
    }
    Ok(())
}

/// Checks that addresses of memory that may be added have at most `bits` bits.
pub(crate) fn check_hotplug_bits(
    size: MemorySize,
    hotplug_bytes: u64,
    bits: u32,
) -> Result<(), MachineError> {
    let end = hotplug_start(size.total).0.saturating_add(hotplug_bytes);
    if hotplug_bytes > 0 && 1_u64.checked_shl(bits).is_some_and(|limit| end > limit) {
        return Err(MachineError::HotplugTooFar { end, bits });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn memory_ends_within_the_addresses_of_the_host() {
        let size = |total| MemorySize {
            total,
            low_end: DEVICE_HOLE_START.min(total),
        };
        assert!(check_address_bits(size(1023 * GIB), 40).is_ok());
        let error = check_address_bits(size(1024 * GIB), 40).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("40 bits") && text.contains(&(1023 * GIB).to_string()),
            "{text}"
        );
        assert!(check_address_bits(size(3 * GIB), 32).is_ok());
        assert!(check_address_bits(size(4 * GIB), 32).is_err());
        assert!(check_address_bits(size(8192 * GIB), 64).is_ok());
        assert!(check_hotplug_bits(size(GIB), 28 * GIB, 35).is_ok());
        assert!(check_hotplug_bits(size(GIB), 29 * GIB, 35).is_err());
        assert!(check_hotplug_bits(size(1023 * GIB), 0, 40).is_ok());
    }

    #[test]
    fn memory_up_to_the_hole_is_one_range() {
        for bytes in [PAGE_BYTES, GIB, 3 * GIB - PAGE_BYTES, 3 * GIB] {
            assert_eq!(guest_memory_ranges(bytes), vec![(GuestAddress(0), bytes)]);
        }
    }

    #[test]
    fn memory_above_the_hole_starts_at_4_gib() {
        for above in [PAGE_BYTES, GIB, 1 << 40] {
            assert_eq!(
                guest_memory_ranges(3 * GIB + above),
                vec![(GuestAddress(0), 3 * GIB), (GuestAddress(4 * GIB), above)]
            );
        }
    }

    #[test]
    fn memory_is_added_above_all_other_at_a_multiple_of_2_gib() {
        for (bytes, start) in [
            (GIB, 4),
            (3 * GIB, 4),
            (3 * GIB + 4096, 6),
            (5 * GIB, 6),
            (6 * GIB, 8),
        ] {
            assert_eq!(hotplug_start(bytes), GuestAddress(start * GIB), "{bytes}");
        }
    }

    #[test]
    fn what_may_be_added_is_the_last_range() {
        let low = (GuestAddress(0), GIB);
        assert_eq!(all_memory_ranges(GIB, 0), [low]);
        assert_eq!(
            all_memory_ranges(GIB, 4 << 20),
            [low, (GuestAddress(4 * GIB), 4 << 20)]
        );
    }

    #[test]
    fn no_memory_has_no_range() {
        assert!(guest_memory_ranges(0).is_empty());
    }

    #[test]
    fn other_regions_are_refused() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0x1000), 4 << 20)]).unwrap();
        assert!(matches!(
            check_memory(&memory, 0),
            Err(MachineError::MemoryRegions { .. })
        ));
        let start = hotplug_start(2 << 20);
        assert_eq!(start, GuestAddress(4 * GIB));
        for (at, bytes, fits) in [
            (start.0, GIB, true),
            (start.0 + GIB, GIB, false),
            (start.0, GIB / 2, false),
        ] {
            let ranges = [
                (GuestAddress(0), 2 << 20),
                (GuestAddress(at), usize::try_from(bytes).unwrap()),
            ];
            let memory = GuestMemoryMmap::from_ranges(&ranges).unwrap();
            assert_eq!(check_memory(&memory, GIB).is_ok(), fits, "{at:#x} {bytes}");
            assert!(check_memory(&memory, 0).is_err());
        }
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        assert!(matches!(
            check_memory(&memory, 0),
            Err(MachineError::MemoryTooSmall { .. })
        ));
    }
}
