//! Address ranges and the devices behind them.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

/// A device on a [`Bus`].
///
/// vCPU threads call these methods concurrently: a device locks what it must. `offset` is relative
/// to the start of the range under which the device was inserted, and the whole access lies in that
/// range. The guest chooses offset, width and data: a device must handle or ignore any of them
/// without panic.
pub trait BusDevice: Send + Sync {
    /// Reads `data.len()` bytes at `offset` into `data`.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Writes `data` at `offset`.
    fn write(&self, offset: u64, data: &[u8]);
}

/// A range of addresses: `len` bytes from `base`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusRange {
    /// The first address.
    pub base: u64,
    /// The number of addresses, at least 1.
    pub len: u64,
}

impl BusRange {
    fn contains(&self, address: u64, width: u64) -> bool {
        // The sum cannot wrap: `insert` checked that `base + len` fits.
        address >= self.base && width <= self.len && address - self.base <= self.len - width
    }
}

impl fmt::Display for BusRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.base, self.base + self.len)
    }
}

/// Why a device cannot be inserted into a bus.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum BusError {
    /// The range is empty.
    #[error("the range at {base:#x} of the {bus} bus is empty: a device needs at least 1 address")]
    Empty {
        /// Name of the bus.
        bus: &'static str,
        /// Where the range would start.
        base: u64,
    },
    /// The range ends after the last address of the bus.
    #[error("{len:#x} addresses from {base:#x} go past the end of the {bus} bus at {limit:#x}")]
    OutOfBounds {
        /// Name of the bus.
        bus: &'static str,
        /// Where the range would start.
        base: u64,
        /// How many addresses it would have.
        len: u64,
        /// One more than the last address of the bus.
        limit: u64,
    },
    /// An address of the range belongs to another device.
    #[error("{asked} overlaps {taken}, which another device of the {bus} bus has")]
    Overlap {
        /// Name of the bus.
        bus: &'static str,
        /// The requested range.
        asked: BusRange,
        /// The existing range.
        taken: BusRange,
    },
}

/// A bus: disjoint ranges, each with its device. It is filled before the machine starts and only
/// read afterwards, so vCPUs take no lock to find a device.
pub struct Bus {
    name: &'static str,
    limit: u64,
    /// Sorted by base.
    devices: Vec<(BusRange, Arc<dyn BusDevice>)>,
}

impl fmt::Debug for Bus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.devices.iter().map(|(range, _)| range);
        write!(f, "Bus {} ", self.name)?;
        f.debug_list().entries(ranges).finish()
    }
}

impl Bus {
    /// The bus of the 65536 I/O ports.
    pub fn port_io() -> Self {
        Self {
            name: "port",
            limit: 0x1_0000,
            devices: Vec::new(),
        }
    }

    /// The bus of memory-mapped registers, by guest-physical address.
    pub fn mmio() -> Self {
        Self {
            name: "mmio",
            limit: u64::MAX,
            devices: Vec::new(),
        }
    }

    /// Inserts `device` at `len` addresses from `base`.
    ///
    /// # Errors
    ///
    /// Fails without effect when the range is empty, exceeds the bus, or overlaps that of another
    /// device.
    pub fn insert(
        &mut self,
        base: u64,
        len: u64,
        device: Arc<dyn BusDevice>,
    ) -> Result<(), BusError> {
        if len == 0 {
            return Err(BusError::Empty {
                bus: self.name,
                base,
            });
        }
        let Some(end) = base.checked_add(len).filter(|end| *end <= self.limit) else {
            return Err(BusError::OutOfBounds {
                bus: self.name,
                base,
                len,
                limit: self.limit,
            });
        };
        let asked = BusRange { base, len };
        let at = self.devices.partition_point(|(range, _)| range.base < base);
        let before = at.checked_sub(1).and_then(|index| self.devices.get(index));
        let after = self.devices.get(at);
        if let Some((taken, _)) = before.filter(|(range, _)| range.base + range.len > base) {
            return Err(BusError::Overlap {
                bus: self.name,
                asked,
                taken: *taken,
            });
        }
        if let Some((taken, _)) = after.filter(|(range, _)| range.base < end) {
            return Err(BusError::Overlap {
                bus: self.name,
                asked,
                taken: *taken,
            });
        }
        self.devices.insert(at, (asked, device));
        Ok(())
    }

    /// Reads `data.len()` bytes at `address`. If no device covers all of these addresses, fills
    /// `data` with ones and returns false.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        match self.find(address, data.len()) {
            Some((offset, device)) => {
                device.read(offset, data);
                true
            }
            None => {
                data.fill(0xff);
                false
            }
        }
    }

    /// Writes `data` at `address`. If no device covers all of these addresses, does nothing and
    /// returns false.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        match self.find(address, data.len()) {
            Some((offset, device)) => {
                device.write(offset, data);
                true
            }
            None => false,
        }
    }

    fn find(&self, address: u64, width: usize) -> Option<(u64, &dyn BusDevice)> {
        let width = u64::try_from(width).ok()?;
        let after = self
            .devices
            .partition_point(|(range, _)| range.base <= address);
        let (range, device) = self.devices.get(after.checked_sub(1)?)?;
        range
            .contains(address, width)
            .then(|| (address - range.base, device.as_ref()))
    }
}

/// Calls `read` for each byte of an access to a device with byte registers, as an ISA bus splits
/// wide accesses.
pub(crate) fn read_bytes(offset: u64, data: &mut [u8], mut read: impl FnMut(u64) -> u8) {
    for (address, byte) in (offset..).zip(data) {
        *byte = read(address);
    }
}

/// Calls `write` for each byte of an access to a device with byte registers.
pub(crate) fn write_bytes(offset: u64, data: &[u8], mut write: impl FnMut(u64, u8)) {
    for (address, byte) in (offset..).zip(data) {
        write(address, *byte);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use proptest::prelude::*;

    use super::*;

    #[derive(Default)]
    struct Recorder {
        writes: Mutex<Vec<(u64, Vec<u8>)>>,
    }

    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(u8::try_from(offset & 0x7f).unwrap());
        }

        fn write(&self, offset: u64, data: &[u8]) {
            self.writes.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    #[test]
    fn accesses_reach_the_device_with_their_offset() {
        let mut bus = Bus::port_io();
        let device = Arc::new(Recorder::default());
        bus.insert(0x3f8, 8, device.clone()).unwrap();
        assert!(bus.write(0x3fa, &[1, 2]));
        assert_eq!(*device.writes.lock().unwrap(), vec![(2, vec![1, 2])]);
        let mut data = [0; 1];
        assert!(bus.read(0x3ff, &mut data));
        assert_eq!(data, [7]);
    }

    #[test]
    fn reads_that_no_device_has_whole_give_ones() {
        let mut bus = Bus::port_io();
        bus.insert(0x3f8, 8, Arc::new(Recorder::default())).unwrap();
        for address in [0, 0x3f5, 0x3fd, 0x400, u64::MAX] {
            let mut data = [0; 4];
            assert!(!bus.read(address, &mut data));
            assert_eq!(data, [0xff; 4]);
            assert!(!bus.write(address, &data));
        }
    }

    #[test]
    fn overlaps_are_refused_with_both_ranges() {
        let mut bus = Bus::port_io();
        bus.insert(0x60, 5, Arc::new(Recorder::default())).unwrap();
        for (base, len) in [(0x64, 1), (0x5f, 2), (0x50, 0x100), (0x61, 1), (0x60, 5)] {
            let error = bus
                .insert(base, len, Arc::new(Recorder::default()))
                .unwrap_err();
            assert!(matches!(error, BusError::Overlap { .. }), "{error}");
            assert!(error.to_string().contains("0x60..0x65"), "{error}");
        }
        bus.insert(0x65, 1, Arc::new(Recorder::default())).unwrap();
        bus.insert(0x5f, 1, Arc::new(Recorder::default())).unwrap();
    }

    #[test]
    fn ranges_outside_the_bus_are_refused() {
        let mut bus = Bus::port_io();
        let device = Arc::new(Recorder::default());
        for (base, len) in [(0xffff, 2), (0x1_0000, 1), (u64::MAX, 2), (0, u64::MAX)] {
            let error = bus.insert(base, len, device.clone()).unwrap_err();
            assert!(matches!(error, BusError::OutOfBounds { .. }), "{error}");
        }
        let error = bus.insert(1, 0, device.clone()).unwrap_err();
        assert!(matches!(error, BusError::Empty { .. }));
        bus.insert(0xffff, 1, device).unwrap();
    }

    proptest! {
        #[test]
        fn a_byte_is_answered_exactly_when_a_range_has_it(
            ranges in proptest::collection::vec((0u64..0x200, 1u64..0x20), 0..12),
            address in 0u64..0x240,
        ) {
            let mut bus = Bus::port_io();
            let mut taken = std::collections::HashSet::new();
            for (base, len) in ranges {
                let free = (base..base + len).all(|a| !taken.contains(&a));
                let result = bus.insert(base, len, Arc::new(Recorder::default()));
                prop_assert_eq!(free, result.is_ok());
                if free {
                    taken.extend(base..base + len);
                }
            }
            let mut data = [0xff];
            prop_assert_eq!(bus.read(address, &mut data), taken.contains(&address));
        }
    }
}
