//! How much of a guest's memory is local.

use memory_fabric::BLOCK_BYTES;
use memory_fabric::fabric::{Layout, TransportKind, replicated_blocks, striped_blocks};

use super::LOCAL_MEMORY_MIN;
use super::redundancy_error::RedundancyError;
use super::settings::RunSettings;
use super::validation::{ValidationError, check_size};
use crate::size::ByteSize;

impl RunSettings {
    /// How much is here at once: what was said, or all, or what the donors leave.
    pub(super) fn checked_local_memory(&self) -> Result<ByteSize, ValidationError> {
        let memory = self.memory;
        let asked = self.memory_asked_of_donors();
        // Hosts with vCPUs lend what may be added from the start.
        let whole = match self.nodes.is_empty() {
            true => memory,
            false => self.shared_memory(),
        };
        let local = match (self.local_memory, asked) {
            (Some(local), _) => local,
            (None, _) if self.donors.is_empty() => whole,
            (None, Some(lent)) => whole.saturating_sub(lent).max(LOCAL_MEMORY_MIN),
            (None, None) => return Err(ValidationError::LocalMemoryNotGiven { memory }),
        };
        check_size("--local-memory", local, LOCAL_MEMORY_MIN)?;
        // What is beyond the guest's memory is a cache for what donors add.
        let limit = self.shared_memory();
        if local > limit {
            return Err(match self.hotplug_memory {
                None => ValidationError::LocalAboveMemory { local, memory },
                Some(hotplug) => ValidationError::LocalAboveAllMemory {
                    local,
                    memory,
                    hotplug,
                    limit,
                },
            });
        }
        let is_alone = self.donors.is_empty() && self.nodes.is_empty();
        if local < memory && is_alone && self.transport != TransportKind::Loopback {
            let missing = memory.saturating_sub(local);
            return Err(ValidationError::NoDonor {
                local,
                memory,
                missing,
            });
        }
        match asked {
            // What other nodes lend is added elsewhere.
            Some(lent)
                if !self.donors.is_empty()
                    && self.nodes.is_empty()
                    && local.saturating_add(lent) < memory =>
            {
                if self.redundancy_flag().is_some() {
                    let what = match self.redundancy {
                        Some(_) => "all pieces",
                        None => "two copies",
                    };
                    let held = lent;
                    let error = RedundancyError::DonorsTooSmall {
                        memory,
                        local,
                        held,
                        what,
                    };
                    return Err(error.into());
                }
                Err(ValidationError::DonorsTooSmall {
                    memory,
                    local,
                    lent,
                })
            }
            _ => Ok(local),
        }
    }

    /// The guest memory that the donors can hold with what they are asked for; `None` when one of
    /// them leaves it open.
    pub(super) fn memory_asked_of_donors(&self) -> Option<ByteSize> {
        let asked: Option<Vec<ByteSize>> = self.donors.iter().map(|donor| donor.memory).collect();
        let asked = asked?;
        if self.redundancy_flag().is_none() {
            let sum = |sum: ByteSize, memory: ByteSize| sum.saturating_add(memory);
            return Some(asked.into_iter().fold(ByteSize::ZERO, sum));
        }
        let layout = self.redundancy.map(|stripes| stripes.0);
        let slot_bytes = BLOCK_BYTES / layout.map_or(1, Layout::data) as u64;
        let slots = asked
            .iter()
            .map(|memory| u32::try_from(memory.bytes() / slot_bytes).unwrap_or(u32::MAX));
        let slots: Vec<u32> = slots.collect();
        let held = match layout {
            Some(layout) => striped_blocks(&slots, layout),
            None => replicated_blocks(&slots),
        };
        Some(ByteSize::from_bytes(u64::from(held) * BLOCK_BYTES))
    }
}
