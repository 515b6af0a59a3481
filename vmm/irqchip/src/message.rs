//! Interrupt messages: what travels from an ICR or an I/O APIC to local APICs.

/// What the receiver does (SDM 11.6.1, bits 10:8 of the ICR).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeliveryMode {
    /// Raise the vector on every CPU of the destination.
    Fixed,
    /// Raise the vector on one CPU of the destination.
    LowestPriority,
    /// System management interrupt. There is no system management mode here.
    Smi,
    /// Non-maskable interrupt.
    Nmi,
    /// Reset and wait for a start-up message.
    Init,
    /// Begin at the page with the number of the vector.
    Startup,
    /// Ask an 8259 for the vector. There is none here.
    ExtInt,
}

impl DeliveryMode {
    /// The mode with this code; code 3 is reserved.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Some(match code & 7 {
            0 => Self::Fixed,
            1 => Self::LowestPriority,
            2 => Self::Smi,
            4 => Self::Nmi,
            5 => Self::Init,
            6 => Self::Startup,
            7 => Self::ExtInt,
            _ => return None,
        })
    }

    /// Whether the receiver raises the vector of the message.
    #[must_use]
    pub fn has_vector(self) -> bool {
        matches!(self, Self::Fixed | Self::LowestPriority)
    }
}

/// How an interrupt was triggered. The end of a level-triggered one is broadcast to the I/O APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// By an edge, as every interrupt between processors is.
    Edge,
    /// By a level.
    Level,
}

/// For which CPUs a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// The CPU whose local APIC has this number.
    Physical(u32),
    /// The CPUs whose logical destination register matches (SDM 11.6.2.2).
    Logical(u32),
    /// All CPUs.
    All,
    /// All CPUs but the sender.
    Others,
}

/// An interrupt message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// What the receiver does.
    pub mode: DeliveryMode,
    /// The vector; for a start-up message the number of a page.
    pub vector: u8,
    /// How it was triggered.
    pub trigger: Trigger,
    /// For whom it is.
    pub destination: Destination,
}

/// The level in an ICR: 0 in an INIT message takes the INIT back.
const ICR_LEVEL: u64 = 1 << 14;
const ICR_TRIGGER: u64 = 1 << 15;
const LOGICAL: u64 = 1 << 11;

/// The low byte of a value.
pub(crate) fn low_byte(value: u64) -> u8 {
    value.to_le_bytes()[0]
}

/// Bits `shift + 31` to `shift`.
pub(crate) fn low_word(value: u64, shift: u32) -> u32 {
    let [a, b, c, d, ..] = (value >> shift).to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

impl Message {
    /// The message that a write of the interrupt command register sends (SDM 11.6.1, 11.12.9), if
    /// any. `id` is the number of the sender.
    #[must_use]
    pub fn from_icr(icr: u64, x2apic: bool, id: u32) -> Option<Self> {
        let mode = DeliveryMode::from_code(low_word(icr, 8))?;
        let takes_back = icr & (ICR_LEVEL | ICR_TRIGGER) == ICR_TRIGGER;
        if mode == DeliveryMode::Init && takes_back {
            // Synchronizes arbitration numbers on processors older than any that has KVM.
            return None;
        }
        let shorthand = (icr >> 18) & 3;
        let logical = icr & LOGICAL != 0;
        let destination = match (shorthand, x2apic) {
            (1, _) => Destination::Physical(id),
            (2, _) => Destination::All,
            (3, _) => Destination::Others,
            (_, true) => match low_word(icr, 32) {
                u32::MAX => Destination::All,
                number if logical => Destination::Logical(number),
                number => Destination::Physical(number),
            },
            (_, false) => Self::narrow_destination(low_byte(icr >> 56), logical),
        };
        // The shorthand for the sender is for vectors only.
        if shorthand == 1 && !mode.has_vector() {
            return None;
        }
        Some(Self {
            mode,
            vector: low_byte(icr),
            trigger: Trigger::Edge,
            destination,
        })
    }

    /// The message of an entry of the I/O APIC (82093AA, 3.2.4).
    #[must_use]
    pub(crate) fn from_redirection(entry: u64) -> Option<Self> {
        let logical = entry & LOGICAL != 0;
        Some(Self {
            mode: DeliveryMode::from_code(low_word(entry, 8))?,
            vector: low_byte(entry),
            trigger: match entry & ICR_TRIGGER {
                0 => Trigger::Edge,
                _ => Trigger::Level,
            },
            destination: Self::narrow_destination(low_byte(entry >> 56), logical),
        })
    }

    /// A destination of 8 bits.
    fn narrow_destination(number: u8, logical: bool) -> Destination {
        match (number, logical) {
            (0xff, _) => Destination::All,
            (_, true) => Destination::Logical(number.into()),
            (_, false) => Destination::Physical(number.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn icr(high: u64, low: u64) -> u64 {
        high << 32 | low
    }

    #[test]
    fn destinations_are_those_of_the_mode() {
        let to = |icr, x2apic| Message::from_icr(icr, x2apic, 9).unwrap().destination;
        assert_eq!(to(icr(3 << 24, 0x40), false), Destination::Physical(3));
        assert_eq!(to(icr(3 << 24, 0x840), false), Destination::Logical(3));
        assert_eq!(to(icr(0xff << 24, 0x40), false), Destination::All);
        assert_eq!(to(icr(300, 0x40), true), Destination::Physical(300));
        assert_eq!(
            to(icr(0x1_0002, 0x840), true),
            Destination::Logical(0x1_0002)
        );
        assert_eq!(to(icr(0xff, 0x40), true), Destination::Physical(0xff));
        assert_eq!(to(icr(0xffff_ffff, 0x840), true), Destination::All);
        for x2apic in [false, true] {
            assert_eq!(to(icr(3, 0x4_0040), x2apic), Destination::Physical(9));
            assert_eq!(to(icr(3, 0x8_0040), x2apic), Destination::All);
            assert_eq!(to(icr(3, 0xc_0040), x2apic), Destination::Others);
        }
    }

    #[test]
    fn an_init_that_is_taken_back_is_no_message() {
        assert!(Message::from_icr(0x8500, false, 0).is_none());
        for sent in [0x4500, 0xc500, 0x500] {
            let message = Message::from_icr(sent, false, 0).unwrap();
            assert_eq!(message.mode, DeliveryMode::Init);
        }
        assert!(Message::from_icr(0x340, false, 0).is_none(), "reserved");
        assert!(
            Message::from_icr(0x4_0400, false, 0).is_none(),
            "NMI to self"
        );
    }
}
