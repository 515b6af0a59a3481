//! Which CPUs a message is for.

use crate::message::{DeliveryMode, Destination, Message};

/// CPUs that a [`TargetSet`] can name: as many as a destination of 8 bits.
pub const CPUS_MAX: usize = 256;

/// What other CPUs must know of a local APIC to send to it. Its number is the index of its CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Routing {
    /// The logical destination register.
    pub logical: u32,
    /// The logical destination is of the cluster model (xAPIC only).
    pub clusters: bool,
    /// In x2APIC mode.
    pub x2apic: bool,
    /// Enabled by the spurious-interrupt vector register.
    pub enabled: bool,
}

const CLUSTERS: u64 = 1 << 32;
const X2APIC: u64 = 1 << 33;
const ENABLED: u64 = 1 << 34;

impl Routing {
    /// In one word, which can be published at once.
    #[must_use]
    pub fn pack(self) -> u64 {
        let flag = |is: bool, bit| if is { bit } else { 0 };
        u64::from(self.logical)
            | flag(self.clusters, CLUSTERS)
            | flag(self.x2apic, X2APIC)
            | flag(self.enabled, ENABLED)
    }

    /// The inverse of [`pack`](Self::pack).
    #[must_use]
    pub fn unpack(word: u64) -> Self {
        Self {
            logical: crate::message::low_word(word, 0),
            clusters: word & CLUSTERS != 0,
            x2apic: word & X2APIC != 0,
            enabled: word & ENABLED != 0,
        }
    }

    /// Whether a logical destination names this CPU (SDM 11.6.2.2 and 11.12.10.1).
    fn matches(self, destination: u32) -> bool {
        if self.x2apic {
            let same_cluster = destination >> 16 == self.logical >> 16;
            return same_cluster && destination & self.logical & 0xffff != 0;
        }
        let own = self.logical >> 24;
        if self.clusters {
            destination >> 4 == own >> 4 && destination & own & 0xf != 0
        } else {
            destination & own != 0
        }
    }
}

/// A set of CPUs, by their index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetSet([u64; CPUS_MAX / 64]);

impl TargetSet {
    fn insert(&mut self, cpu: usize) {
        if let Some(word) = self.0.get_mut(cpu / 64) {
            *word |= 1 << (cpu % 64);
        }
    }

    /// The CPUs, in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let words = self.0;
        (0..CPUS_MAX).filter(move |cpu| words[cpu / 64] >> (cpu % 64) & 1 != 0)
    }
}

/// The CPUs that `message` from CPU `sender`, or from a device, is for. `cpus` gives what each CPU
/// has published, in order.
///
/// A message of lowest priority goes to one CPU, chosen by the vector: the same vector goes to the
/// same CPU as long as the CPUs are the same, which keeps its handler's data in one cache.
pub fn targets(
    message: &Message,
    sender: Option<usize>,
    cpus: impl Iterator<Item = Routing>,
) -> TargetSet {
    let lowest = message.mode == DeliveryMode::LowestPriority;
    let mut set = TargetSet::default();
    for (index, cpu) in cpus.enumerate().take(CPUS_MAX) {
        let is_meant = match message.destination {
            Destination::Physical(number) => usize::try_from(number) == Ok(index),
            Destination::Logical(number) => cpu.matches(number),
            Destination::All => true,
            Destination::Others => sender != Some(index),
        };
        if is_meant && (cpu.enabled || !lowest) {
            set.insert(index);
        }
    }
    if lowest {
        let count = set.iter().count().max(1);
        let chosen = set.iter().nth(usize::from(message.vector) % count);
        set = TargetSet::default();
        chosen.into_iter().for_each(|cpu| set.insert(cpu));
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Trigger;

    fn message(mode: DeliveryMode, destination: Destination) -> Message {
        Message {
            mode,
            vector: 0x41,
            trigger: Trigger::Edge,
            destination,
        }
    }

    fn cpus(of: impl Fn(u32) -> Routing) -> Vec<Routing> {
        (0..8).map(of).collect()
    }

    fn reached(message: &Message, sender: Option<usize>, cpus: &[Routing]) -> Vec<usize> {
        targets(message, sender, cpus.iter().copied())
            .iter()
            .collect()
    }

    fn x2apic(id: u32) -> Routing {
        Routing {
            logical: (id >> 4) << 16 | 1 << (id & 15),
            x2apic: true,
            enabled: true,
            ..Routing::default()
        }
    }

    #[test]
    fn packing_keeps_everything() {
        for flags in 0..8 {
            let routing = Routing {
                logical: 0x8765_4321,
                clusters: flags & 1 != 0,
                x2apic: flags & 2 != 0,
                enabled: flags & 4 != 0,
            };
            assert_eq!(Routing::unpack(routing.pack()), routing);
        }
    }

    #[test]
    fn physical_and_shorthand_destinations() {
        let cpus = cpus(|_| Routing::default());
        let to = |destination| {
            reached(
                &message(DeliveryMode::Fixed, destination),
                Some(2),
                &cpus[..4],
            )
        };
        assert_eq!(to(Destination::Physical(3)), [3]);
        assert_eq!(to(Destination::Physical(4)), [0; 0]);
        assert_eq!(to(Destination::All), [0, 1, 2, 3]);
        assert_eq!(to(Destination::Others), [0, 1, 3]);
        let of_device = message(DeliveryMode::Nmi, Destination::Others);
        assert_eq!(reached(&of_device, None, &cpus[..4]), [0, 1, 2, 3]);
    }

    #[test]
    fn logical_destinations_of_each_model() {
        let flat = cpus(|id| Routing {
            logical: 1 << (24 + id),
            enabled: true,
            ..Routing::default()
        });
        let to = |number| message(DeliveryMode::Fixed, Destination::Logical(number));
        assert_eq!(reached(&to(0b1010_0001), None, &flat), [0, 5, 7]);
        // Four CPUs a cluster.
        let clusters = cpus(|id| Routing {
            logical: ((id / 4) << 4 | 1 << (id % 4)) << 24,
            clusters: true,
            enabled: true,
            ..Routing::default()
        });
        assert_eq!(reached(&to(0x15), None, &clusters), [4, 6]);
        let wide: Vec<_> = (0..40).map(x2apic).collect();
        assert_eq!(reached(&to(0x0001_8003), None, &wide), [16, 17, 31]);
        assert_eq!(reached(&to(0x0002_0000), None, &wide), [0; 0]);
    }

    #[test]
    fn lowest_priority_is_for_one_enabled_cpu() {
        let mut cpus = cpus(x2apic);
        let lowest = message(DeliveryMode::LowestPriority, Destination::Logical(0b1110));
        let [first] = reached(&lowest, None, &cpus)[..] else {
            panic!("not one")
        };
        assert!((1..=3).contains(&first));
        assert_eq!(reached(&lowest, None, &cpus), [first], "always the same");
        cpus[first].enabled = false;
        let [second] = reached(&lowest, None, &cpus)[..] else {
            panic!("not one")
        };
        assert_ne!(first, second);
        for cpu in &mut cpus {
            cpu.enabled = false;
        }
        assert_eq!(reached(&lowest, None, &cpus), [0; 0]);
    }
}
